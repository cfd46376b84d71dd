"""`python -m mindspeed_tpi` is the command `mindspeed-tpi`."""

import sys

from mindspeed_tpi.cli import main

sys.exit(main())
