"""Install the example vendor package into a clean environment and verify it from outside.

    python ci/vendor_package.py [--keep FOLDER]

The environment has nothing of its own but the package: torch and anyattn are read from the environment that
runs this script, through a `.pth` file, so nothing is downloaded. Then, as a vendor would: is it found, is it
chosen on its device, does the kit pass, do its own tests pass. Fails with the first step that does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "examples" / "vendor_package"
BACKENDS = ("lumen_flash", "lumen_stream")


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    """Standard output of a command; its output is shown and the script ends where it fails."""
    begin = time.perf_counter()
    # ANYATTN_* of the caller would choose for the vendor; threads of two processes would fight.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ANYATTN_")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = " ".join(str(part) for part in command[1:])
    print(f"[{time.perf_counter() - begin:5.1f} s] {shown}", flush=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        sys.exit(f"failed with {done.returncode}: {shown}")
    return done.stdout


def install(folder: Path) -> Path:
    """The Python of a new environment with the package in it."""
    wheels = folder / "wheels"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--quiet", "--no-deps", "--no-index")
    # A copy is built: setuptools leaves folders beside the sources.
    copy = folder / "vendor_package"
    run("cp", "-r", PACKAGE, copy, cwd=folder)
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", wheels, copy, cwd=folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    (wheel,) = wheels.glob("*.whl")
    run(*pip, "--python", python, "install", *offline, wheel, cwd=folder)
    here = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    shared = [path for path in sys.path if path.endswith("-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in shared]
    (Path(here) / "shared.pth").write_text("\n".join([*lines, str(ROOT), ""]), encoding="utf-8")
    return python


def verify(python: Path, folder: Path) -> None:
    """What a user, a vendor and a CI owner each do first."""
    cli = (python, "-m", "anyattn.cli.main")
    outside = folder / "outside"
    outside.mkdir()
    expect(run(*cli, "doctor", cwd=outside), "lumen_flash", "platform of anyattn-lumen 0.1.0")
    chosen = run(*cli, "select", "--assume", "lumen:l2", cwd=outside)
    expect(chosen, "prefill  lumen_flash", "decode   lumen_stream", "torch_native")
    expect(run(*cli, "backends", cwd=outside, LUMEN_SIMULATOR="l1"), "Lumen L1", "lumen_flash")
    for backend in BACKENDS:
        told = run(*cli, "verify", backend, "--device", "lumen", cwd=outside, LUMEN_SIMULATOR="l2")
        expect(told, "on lumen:l2", " 0 failed")
        print(f"          {told.strip().splitlines()[-1]}")
    tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    told = run(*tests, folder / "vendor_package" / "tests", cwd=outside)
    print(f"          {told.strip().splitlines()[-1]}")


def expect(text: str, *wanted: str) -> None:
    """End the script where a word that should be there isn't."""
    for word in wanted:
        if word not in text:
            print(text)
            sys.exit(f"not found in the output: {word!r}")


def main() -> int:
    """0 when everything held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="make the environment there and leave it")
    keep = parser.parse_args().keep
    begin = time.perf_counter()
    if keep is not None:
        keep.mkdir(parents=True)
        verify(install(keep.resolve()), keep.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            verify(install(Path(folder)), Path(folder))
    print(f"the example vendor package stands, in {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
