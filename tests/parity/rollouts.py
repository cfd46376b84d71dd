"""Makes the rollouts of one model in a process of its own: python -m tests.parity.rollouts JOBS.json

JOBS.json: [{"request": {...}, "out": path}, …], all for the same mode. One interpreter serves every engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mindspeed_tpi.parity import engine
from mindspeed_tpi.parity.request import Request

if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        engine.run(Request.from_json(json.dumps(job["request"]))).save(job["out"])
        print(job["out"], flush=True)
