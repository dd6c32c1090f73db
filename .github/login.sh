#!/bin/bash
# Leaves what `docker login` would: credentials for the host of $REGISTRY, in docker's own file. A container has
# no docker to log in with.
set -euo pipefail
umask 077
mkdir -p "$HOME/.docker"
auth=$(printf '%s:%s' "$REGISTRY_USER" "$REGISTRY_TOKEN" | base64 -w 0)
printf '{"auths": {"%s": {"auth": "%s"}}}\n' "${REGISTRY%%/*}" "$auth" >"$HOME/.docker/config.json"
