#!/bin/bash
# Runs on a GPU runner before each job, and stops every job but those of nightly.yml on the default branch. A pull
# request may bring a workflow of its own that asks for this runner's labels, and no file of this repository
# forbids that. docs/site-ci.md says how to install it: as a copy, outside of the runner's work folder.
#
# GitHub's runner sets these variables for a hook; the `env:` of a workflow does not reach it.
set -eu
allowed=OWNER/NAME/.github/workflows/nightly.yml@refs/heads/main

case "${GITHUB_EVENT_NAME-}" in
    schedule | workflow_dispatch) [ "${GITHUB_WORKFLOW_REF-}" != "$allowed" ] || exit 0 ;;
esac
echo "this runner takes jobs of $allowed, and no ${GITHUB_EVENT_NAME-} of ${GITHUB_WORKFLOW_REF-}" >&2
exit 1
