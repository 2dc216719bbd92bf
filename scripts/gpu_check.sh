#!/usr/bin/env bash
# Everything that needs a GPU, in one command; no network. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
python3 -m pytest -m gpu -rA --show-capture=no -q "$@"
