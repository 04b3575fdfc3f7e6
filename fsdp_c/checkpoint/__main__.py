"""python -m fsdp_c.checkpoint"""

import sys

from fsdp_c.checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
