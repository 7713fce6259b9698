"""All benchmarks, one after the other, and their tables in docs/evidence.md.

    .venv/bin/python -m benchmarks [--out FOLDER] [--only NAME ...]

What has ended is not run again: the same command goes on after an interruption, and a new folder
starts anew. Each benchmark leaves NAME.json and NAME.log in the folder. They want the machine for
themselves, and take hours. The ablation, `benchmarks.method`, has no goal and is run by itself.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.results import read_json, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence.md"
NAMES = ("demo", "server", "weight_sync", "data_plane", "full_size", "steps")


def measure(name: str, out: Path) -> bool:
    """Run the benchmark, unless its results are there; False when it fails."""
    results, part = out / f"{name}.json", out / f"{name}.json.part"
    if results.exists():
        print(f"{name}: measured before, see {results}", flush=True)
        return True
    print(f"{name} ...", flush=True)
    with (out / f"{name}.log").open("w") as log:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(part)]
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
    if code:
        print(f"{name}: ended with code {code}, see {log.name}", flush=True)
        return False
    part.rename(results)
    return True


def with_table(page: str, name: str, rows: str) -> str:
    """The page with another table below the command of the benchmark.

    Raises ValueError where it has no such command with a table.
    """
    command = rf"`\.venv/bin/python -m benchmarks\.{name}\b"
    below = re.compile(rf"({command}(?:(?!\n## ).)*?\n)\|.*?(?=\n\n|\n*\Z)", re.DOTALL)
    found = below.search(page)
    if found is None:
        raise ValueError(f"no table below the command of benchmarks.{name}")
    return page[: found.end(1)] + rows + page[found.end() :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ended = [name for name in options.only if measure(name, options.out)]
    for name in ended:
        rows = table(read_json(options.out / f"{name}.json"))
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), name, rows), encoding="utf-8")
    sys.exit(0 if ended == options.only else 1)


if __name__ == "__main__":
    main()
