"""torchrun --nproc-per-node 2 -m distributed.smoke"""

from distributed.smoke.checks import main
from distributed.torch import leave

leave(main())
