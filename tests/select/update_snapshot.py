"""Rewrite `tests/select/snapshot/*.txt` from the catalog and the preferences as they are. Review the diff."""

from __future__ import annotations

from snapshot_lines import FOLDER, MODELS, render


def main() -> None:
    """Write every file and name those that changed."""
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        path, text = FOLDER / f"{name}.txt", render(name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"changed: {path.name}")


if __name__ == "__main__":
    main()
