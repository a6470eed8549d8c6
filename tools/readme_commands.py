"""Print the commands that README.md marks by name, so that CI runs exactly what readers run.

    python tools/readme_commands.py install

prints the fenced block that follows the comment `<!-- command: install -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(
    r"<!-- command: (\S+) -->\s*\n```(?:bash|sh|console)?\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


def commands(text: str) -> dict[str, str]:
    """Returns the marked blocks of a README by name."""
    return dict(BLOCK.findall(text))


def main(arguments: list[str]) -> int:
    blocks = commands(README.read_text(encoding="utf-8"))
    if len(arguments) != 1 or arguments[0] not in blocks:
        print(
            f"usage: readme_commands.py NAME; {README.name} has: {', '.join(blocks) or 'none'}",
            file=sys.stderr,
        )
        return 2
    print(blocks[arguments[0]], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
