"""torchrun --nproc-per-node 2 -m distributed.smoke"""

import sys

from distributed.smoke.collective_checks import main
from distributed.torch import leave

leave(main(sys.argv[1:]))
