#!/usr/bin/env bash
# Everything that needs a GPU, in one command of eight minutes at most; no network. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
python3 -m pytest -m "gpu and not slow" -rA --show-capture=no -q "$@"
python3 -m scripts.bench_engine --size 0.8B --workload race,quality_all --seeded 0
