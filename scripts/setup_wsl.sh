#!/usr/bin/env bash
# One-shot setup of Crucible under WSL2 (Ubuntu): compiler, CUDA toolkit, a Python of its own, the package.
#
#   bash scripts/setup_wsl.sh [--no-toolkit] [--dry-run]
#
# --no-toolkit: Crucible compiles its kernels with NVRTC from PyPI and torch brings its own libraries, so nvcc is needed
#   only for other CUDA programs. --dry-run prints the commands instead of running them.
#
# Never installs a driver: Windows' own reaches the guest through /dev/dxg, and a second one breaks that. The toolkit
# comes as cuda-toolkit-*, not as "cuda" or "cuda-drivers", and apt is told never to take a driver along.
set -euo pipefail

PYTHON=3.12          # torch has wheels for it; a distribution's newest Python it may not
CUDA=13-0            # sm_120 needs 12.8 or newer
KEYRING=https://developer.download.nvidia.com/compute/cuda/repos/wsl-ubuntu/x86_64/cuda-keyring_1.1-1_all.deb
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
TOOLKIT=1
DRY=0

for argument in "$@"; do
    case $argument in
        --no-toolkit) TOOLKIT=0 ;;
        --dry-run) DRY=1 ;;
        -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "setup_wsl.sh: unknown argument $argument (see --help)" >&2; exit 2 ;;
    esac
done

run() {
    echo "+ $*"
    if [ "$DRY" = 0 ]; then "$@"; fi
}

say() { printf '\n== %s\n' "$*"; }

SUDO=sudo
if [ "$(id -u)" = 0 ]; then SUDO=; fi

say "Machine"
if ! grep -qi microsoft /proc/version 2>/dev/null; then
    echo "This is not WSL; going on (on plain Linux install the driver yourself, as your distribution says)."
fi
if [ -x /usr/lib/wsl/lib/nvidia-smi ]; then
    run /usr/lib/wsl/lib/nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
elif ! command -v nvidia-smi >/dev/null; then
    echo "No nvidia-smi: update the NVIDIA driver in Windows. Setting up for the CPU meanwhile."
fi

say "Compiler"
run $SUDO apt-get update
run $SUDO apt-get install -y --no-install-recommends build-essential git curl ca-certificates libgomp1

if [ "$TOOLKIT" = 1 ]; then
    say "CUDA toolkit (no driver)"
    NO_DRIVER='Package: nvidia-driver-* libnvidia-* nvidia-dkms-* nvidia-open* cuda-drivers* cuda-runtime-*\nPin: release *\nPin-Priority: -1\n'
    run $SUDO sh -c "printf '$NO_DRIVER' > /etc/apt/preferences.d/crucible-never-a-driver"
    run curl -fsSLo /tmp/cuda-keyring.deb "$KEYRING"
    run $SUDO dpkg -i /tmp/cuda-keyring.deb
    run $SUDO apt-get update
    run $SUDO apt-get install -y --no-install-recommends "cuda-toolkit-$CUDA"
fi

say "Python $PYTHON, managed by uv"
if ! command -v uv >/dev/null && [ ! -x "$HOME/.local/bin/uv" ]; then
    run curl -LsSfo /tmp/install-uv.sh https://astral.sh/uv/install.sh
    run sh /tmp/install-uv.sh
fi
export PATH="$HOME/.local/bin:$PATH"
run uv python install "$PYTHON"
run uv venv --python "$PYTHON" --managed-python --allow-existing "$VENV"

say "Crucible"
run uv pip install --python "$VENV/bin/python" setuptools cython numpy
run uv pip install --python "$VENV/bin/python" --no-build-isolation -e "$ROOT[train,cuda13,dev]"

say "Check"
run "$VENV/bin/crucible" tokenize "The World is a stage"
run "$VENV/bin/python" "$ROOT/scripts/verify_gpu.py"
echo
echo "Done. Next: source $VENV/bin/activate && crucible-train quickstart --out runs/quickstart"
