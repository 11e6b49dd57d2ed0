"""``python -m pdkv.harness`` is ``python -m pdkv.harness.gsm8k``."""

import sys

from pdkv.harness.gsm8k import main

if __name__ == "__main__":
    sys.exit(main())
