"""Refuse what the kit's trainer would refuse, before anything is started: one line a fault, exit code 2.

Usage: python config.py NPROC [WORD...]     the words are the trainer's own
"""

import sys
from contextlib import suppress
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from distributed.checkpoint.compatibility import refuse_misfit  # noqa: E402
from distributed.checkpoint.directory import CheckpointError, described  # noqa: E402
from distributed.config import ConfigError, for_ranks, holds_settings, parser  # noqa: E402

nproc, *words = sys.argv[1:]
if not {"--help", "-h"} & set(words):  # to these the trainer itself has the answer
    options = parser("", "train.py").parse_intermixed_args(words)
    try:
        settings, _ = for_ranks(options, int(nproc))
        for newest in described(settings.checkpoint.dir)[:1] if settings.checkpoint.dir else ():
            refuse_misfit(newest, settings, settings.model.vocab_size)
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"{error}\n")
        with suppress(ConfigError):
            if options.config and not holds_settings(options.config):
                hint = "no setting of the kit's train.py is in this file; for a script of your own, add --script FILE"
                sys.stderr.write(f"{options.config}: {hint}\n")
        sys.exit(2)
