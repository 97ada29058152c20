# Sourced by every script: finds a Python, creates the environment, installs what a lock file names and the package.
#   FASTDEPLOY_KVCACHE_VENV   where the environment lives (default: .venv in the checkout)
#   PYTHON                    the interpreter to create it with (default: python3, else python3.13 ... python3.10)
#   FASTDEPLOY_KVCACHE_NO_APT=1  names what the system lacks, where root would install it with apt-get
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
NEWEST=13 WHAT_FOR=""
[ "$LOCK" != fastdeploy ] || NEWEST=12 WHAT_FOR=" for FastDeploy"
VENV="$(realpath -m "${FASTDEPLOY_KVCACHE_VENV:-$ROOT/.venv}")"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# The first interpreter that fits, one that can make environments before one that cannot; nothing where none fits.
find_python() {
    local needs candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for needs in "ensurepip, venv" sys; do
        for candidate in "${candidates[@]}"; do
            if "$candidate" -c "import sys, $needs; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $NEWEST))" 2>/dev/null; then
                echo "$candidate"
                return
            fi
        done
    done
}

# Debian's names of the packages that the system must have and lacks, asked of the interpreter in $1.
lacking() {
    if ! command -v "$1" >/dev/null; then
        echo python3 python3-venv libgomp1
        return
    fi
    [ "$1" = "$VENV/bin/python" ] || "$1" -c 'import ensurepip, venv' 2>/dev/null || echo "$(basename "$1")-venv"
    "$1" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null || echo libgomp1
}

# What no package from PyPI brings: a Python with venv, and the library that Paddle loads. Root with apt-get gets it
# installed, others are told the one command. The interpreter is $1.
install_must_haves() {
    local packages
    packages="$(lacking "$1" | xargs)"
    [ -n "$packages" ] || return 0
    command -v apt-get >/dev/null ||
        die "this system lacks what Debian calls $packages: install it with the system's package manager"
    [ "$(id -u)" = 0 ] || die "this system lacks $packages: sudo apt-get install -y $packages"
    [ -z "${FASTDEPLOY_KVCACHE_NO_APT:-}" ] ||
        die "this system lacks $packages: apt-get update && apt-get install -y $packages"
    echo "Installing $packages with apt-get, which this system lacks (FASTDEPLOY_KVCACHE_NO_APT=1 forbids it)" >&2
    # shellcheck disable=SC2086
    { apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 --no-install-recommends install $packages; } \
        >/dev/null 2>&1 </dev/null || true
    packages="$(lacking "$1" | xargs)"
    [ -z "$packages" ] || die "apt-get did not install $packages: apt-get update && apt-get install -y $packages says why"
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
        [ -n "$python" ] || [ -z "${PYTHON:-}" ] || die_of_python
        install_must_haves "${python:-python3}"
        python="$(find_python)"
        [ -n "$python" ] || python="$(bring_python)" || die_of_python
        echo "Creating $VENV with $("$python" -V)" >&2
        "$python" -m venv --clear "$VENV" >/dev/null 2>&1 ||
            die "$python cannot create a virtual environment in $VENV: install its venv module (Debian, Ubuntu: apt install python3-venv)"
    fi
    install_must_haves "$VENV/bin/python"
    "$VENV/bin/python" -m pip install -qq --require-hashes -r "$ROOT/locks/uv.txt" >&2 </dev/null ||
        die "pip could not install uv, its message is above: check the network, or set PIP_INDEX_URL to a mirror of PyPI"
}

# Where the system's Pythons are too new or too old, uv has builds of its own. They come from its site, not from PyPI.
bring_python() {
    local uv="$VENV.uv"
    [ -z "${PYTHON:-}" ] || return
    echo "This system has no Python 3.10 to 3.$NEWEST: uv is asked for one" >&2
    {
        python3 -m venv --clear "$uv" &&
            "$uv/bin/python" -m pip install -qq --require-hashes -r "$ROOT/locks/uv.txt" &&
            timeout 600 "$uv/bin/python" -m uv python install "3.$NEWEST"
    } >/dev/null 2>&1 </dev/null || return
    "$uv/bin/python" -m uv python find --managed-python "3.$NEWEST"
}

die_of_python() {
    local python="${PYTHON:-python3}"
    die "Python 3.10 to 3.$NEWEST is needed$WHAT_FOR," \
        "$python is $(command -v "$python" >/dev/null && "$python" -V 2>&1 || echo missing):" \
        "install one, or set PYTHON=/path/to/python3"
}

# uv, for this environment and no other.
uv_pip() {
    VIRTUAL_ENV="$VENV" "$VENV/bin/python" -m uv --quiet pip "$@" >&2 </dev/null
}

install_env() {
    local stamp="$VENV/.fastdeploy-kvcache-stamp"
    [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ] && [ -z "$(lacking "$VENV/bin/python")" ] && return
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
