# Sourced by every script: finds a Python, creates the environment, installs what a lock file names and the package.
#   FASTDEPLOY_KVCACHE_VENV   where the environment lives (default: .venv in the checkout)
#   PYTHON                    the interpreter to create it with (default: python3, else python3.12 ... python3.10)
# A script with an environment of its own sets LOCK (a file in locks/) and FASTDEPLOY_KVCACHE_VENV before it sources this.
# shellcheck shell=bash
set -euo pipefail

die() {
    echo "error: $*" >&2
    exit 1
}

[ "$(uname -s)" = Linux ] || die "Linux is needed, this is $(uname -s): use a virtual machine or a container"

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
LOCK="${LOCK:-dev}"
VENV="$(realpath -m "${FASTDEPLOY_KVCACHE_VENV:-$ROOT/.venv}")"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.10, 3.11 or 3.12 is needed, ${PYTHON:-python3} is $("${PYTHON:-python3}" -V 2>&1 || true):" \
        "install one, or set PYTHON=/path/to/python3"
}

# What the installed environment was made from: when this is unchanged, there is nothing to do.
fingerprint() {
    {
        echo "$ROOT"
        cd "$ROOT"
        cat pyproject.toml setup.py locks/uv.txt "locks/$LOCK.txt"
        find custom_ops -type f -not -path '*/tests/*' -not -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 cat
    } | cksum
}

# An environment with nothing in it but pip and the locked uv, which installs everything else.
create_env() {
    local python
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)"
        echo "Creating $VENV with $("$python" -V)" >&2
        "$python" -m venv --clear "$VENV" >/dev/null 2>&1 ||
            die "$python cannot create a virtual environment in $VENV: install its venv module (Debian, Ubuntu: apt install python3-venv)"
    fi
    "$VENV/bin/python" -m pip install -qq --require-hashes -r "$ROOT/locks/uv.txt" >&2 </dev/null ||
        die "pip could not install uv, its message is above: check the network, or set PIP_INDEX_URL to a mirror of PyPI"
}

# uv, for this environment and no other.
uv_pip() {
    VIRTUAL_ENV="$VENV" "$VENV/bin/python" -m uv --quiet pip "$@" >&2 </dev/null
}

install_env() {
    local stamp="$VENV/.fastdeploy-kvcache-stamp"
    [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ] && "$VENV/bin/python" -c '' 2>/dev/null && return
    create_env
    echo "Installing the package and its dependencies (the first time takes about a minute)" >&2
    uv_pip sync --require-hashes "$ROOT/locks/$LOCK.txt" ||
        die "the dependencies in locks/$LOCK.txt were not installed; uv's message is above"
    FASTDEPLOY_KVCACHE_BUILD=none uv_pip install --no-deps --no-build-isolation -e "$ROOT" ||
        die "the package was not installed; uv's message is above"
    "$VENV/bin/python" "$ROOT/custom_ops/build.py" >&2
    fingerprint >"$stamp"
}

# Two scripts started at the same time must not install into one environment at the same time.
setup_env() {
    mkdir -p "$(dirname "$VENV")"
    if command -v flock >/dev/null; then
        (flock 9 && install_env) 9>"$VENV.lock"
    else
        install_env
    fi
    export PATH="$VENV/bin:$PATH"
    # Containers often set the second one. Without bytecode every process compiles Paddle anew: a server starts in 3 s, not in 1.
    unset PYTHONHOME PYTHONDONTWRITEBYTECODE
    cd "$ROOT"
}
