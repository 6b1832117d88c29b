"""python -m router CONFIG_FILE: one router process."""

import sys
from pathlib import Path

from protocol.errors import ConfigError
from router.process import load_config, run


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m router CONFIG_FILE", file=sys.stderr)
        return 2
    try:
        run(load_config(Path(arguments[0])))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
