#!/bin/sh
# Sets up imagefactory in .venv beside this file, from Debian's packages and hashed PyPI packages.
#   ./setup.sh           what building needs
#   ./setup.sh --tests   also what the tests need
# Run it again at any time: what is there is left alone. Package hosts are this machine's own settings.
set -eu
cd "$(dirname "$0")"

packages="python3 python3-venv mmdebstrap ca-certificates"
requirements=requirements/build.txt
case "${1:-}" in
    "") ;;
    --tests)
        packages="$packages uidmap gcc g++ libc6-dev git skopeo podman catatonit"
        # For the engines that tests/services/install unpacks: what they call, and how two of them are mended.
        packages="$packages iproute2 iptables openssl libsqlite3-0 patchelf squashfs-tools squashfuse fakeroot"
        # Reports are looked at in a real browser, which needs a font with their symbols.
        packages="$packages chromium fonts-dejavu-core"
        # Modules as sites have them.
        packages="$packages lmod"
        # Programs of another processor, which the sandbox starts by it.
        packages="$packages qemu-user-static"
        # A real ssh-agent signs.
        packages="$packages openssh-client"
        requirements=requirements/dev.txt
        ;;
    *)
        echo "usage: ./setup.sh [--tests]" >&2
        exit 2
        ;;
esac

[ "${1:-}" != --tests ] || tests/services/check_machine

missing=""
for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
if [ -n "$missing" ]; then
    if [ "$(id -u)" -ne 0 ]; then
        echo "Debian's packages are missing; as root, run: apt-get install -y$missing" >&2
        exit 6
    fi
    echo "setup: installing Debian's packages:$missing" >&2
    apt-get update -qq
    # shellcheck disable=SC2086 # a list of package names
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

if [ "${1:-}" = --tests ]; then
    tests/services/install
    tests/services/install_condor
fi

# Prints a setting of pip, or fails without it.
pip_setting() {
    for place in :env: install global; do
        printf '%s\n' "$pip_settings" | sed -n "s/^$place\.$1='\(.*\)'\$/\1/p" | sed 's/\\n/ /g' | grep . && return
    done
    return 1
}

# uv does not read pip's settings, which say where this machine gets packages. Hashes decide which files count, so
# that indexes need no order.
pip_settings_for_uv() {
    pip_settings=$(.venv/bin/python -m pip config list)
    export UV_INDEX_STRATEGY=unsafe-best-match
    if value=$(pip_setting index-url); then export UV_DEFAULT_INDEX="$value"; fi
    if value=$(pip_setting extra-index-url); then export UV_INDEX="$value"; fi
    if value=$(pip_setting find-links); then UV_FIND_LINKS=$(echo "$value" | tr ' ' ,); export UV_FIND_LINKS; fi
    if value=$(pip_setting trusted-host); then export UV_INSECURE_HOST="$value"; fi
    if value=$(pip_setting cert); then export SSL_CERT_FILE="$value"; fi
    if value=$(pip_setting proxy); then export HTTP_PROXY="$value" HTTPS_PROXY="$value"; fi
    if value=$(pip_setting client-cert); then export SSL_CLIENT_CERT="$value"; fi
    if value=$(pip_setting no-index); then export UV_NO_INDEX="$value"; fi
}

# The machine's own Python, not one that happens to be first on PATH.
python=/usr/bin/python3
stamp=.venv/installed-from
wanted="$(cat "$requirements" pyproject.toml setup.sh | sha256sum) $requirements"
if [ ! -x .venv/bin/imagefactory ] || [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    echo "setup: installing Python packages of $requirements into .venv" >&2
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # pip brings uv, by its hash, and uv the rest: it fetches, unpacks and compiles on all cores.
    sed -n '/^uv==/,/[^\\]$/p' "$requirements" | .venv/bin/python -m pip install --quiet \
        --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r /dev/stdin >&2
    pip_settings_for_uv
    .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --require-hashes --only-binary :all: \
        --compile-bytecode -r "$requirements" >&2
    .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable . >&2
    .venv/bin/imagefactory --version >&2
    printf '%s\n' "$wanted" >"$stamp"
fi
