"""Entry point of ``python -m fsdp_c``."""

import sys

from fsdp_c.cli import main

if __name__ == "__main__":
    sys.exit(main())
