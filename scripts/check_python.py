"""Run by each supported Python: does the whole tree compile, and does the metadata admit this interpreter?

Standard library only, and no import of the project: these interpreters have nothing installed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    name = "Python {}.{}.{}".format(*sys.version_info[:3])
    problems = []
    sources = [
        path for folder in ("relax_tq_rdma", "tests", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    for path in sources:
        try:
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as exc:
            problems.append(f"{path.relative_to(ROOT)}: {exc}")

    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # tomllib is there from 3.11 on only
    lowest = re.search(r'^requires-python = ">=(\d+)\.(\d+)"$', metadata, re.M)
    if lowest is None or sys.version_info[:2] < tuple(int(part) for part in lowest.groups()):
        problems.append("pyproject.toml: requires-python does not admit this interpreter")
    if '"Programming Language :: Python :: {}.{}"'.format(*sys.version_info[:2]) not in metadata:
        problems.append("pyproject.toml: no classifier for this interpreter")

    for problem in problems:
        print(f"{name}: {problem}")
    print(f"{name}: {len(sources)} files compiled, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
