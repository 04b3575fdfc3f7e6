"""python -m fsdp_c.where FOLDER: where each rank is, by the flight records of FSDP_C_LEDGER=FOLDER."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fsdp_c.tools import flight_recorder


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line. Returns 0, or 1 where there is nothing to read."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_c.where", description="Where each rank is.")
    parser.add_argument("folder", help="what FSDP_C_LEDGER was set to")
    try:
        print(flight_recorder.describe(flight_recorder.read(parser.parse_args(arguments).folder)))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
