"""``clusterd simulate`` with published traces and their authors' own schedulers, for the figures in docs/simulate.md.

python tests/benchmarks/peers.py --oracle --cluster 16x4:t4 --workload DATA/pollux/workloads/workload-6.csv \\
    --truth DATA/pollux/t4 --round 60 --move-cost 30 --start-cost 30 --known-by count --policy pollux-tiresias

The options are those of ``clusterd simulate``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from clusterd.cli.simulate import simulate
from clusterd.core.policies import POLICIES
from clusterd.simulate import trace
from tests.benchmarks import traces
from tests.benchmarks.published import PUBLISHED

# At import: processes that run policies side by side import this file, too.
POLICIES.update(PUBLISHED)
trace.OTHER_FORMATS.append(traces.read)

if __name__ == "__main__":
    simulate()
