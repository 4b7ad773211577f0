"""The training script of a user, for tests of job lists: it refuses arguments that it does not know.

With mode base_only it writes the files of a base model. In other modes it writes result.json, with the base model that
it found, if any.
"""

import argparse
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--mode", choices=("base_only", "full_fine_tuning"))
parser.add_argument("--fold", type=int)
parser.add_argument("--participants", nargs="+", default=["01", "02", "03"])
parser.add_argument("--prefix")
parser.add_argument("--target_batch_pct", type=float)
parser.add_argument("--device", required=True)
options = parser.parse_args()
output, base = Path(os.environ["MUSTER_OUTPUT_DIR"]), os.environ.get("MUSTER_BASE_MODEL")
if options.mode == "base_only":
    for name in ("base_metrics.json", "base_losses.json", "base_config.json"):
        (output / name).write_text('{"held_out_loss": 1.5}')
    (output / "best_base_model.pt").write_text("trained on " + " ".join(options.participants))
else:
    weights = Path(base, "best_base_model.pt").read_text() if base else ""
    found = {"held_out": options.participants[options.fold], "weights": weights}
    (output / "result.json").write_text(json.dumps(found | {"job": json.loads(os.environ["MUSTER_JOB"])}))
