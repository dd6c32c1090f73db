"""What each setting means, in the words that people read: its default, and what it holds."""

from __future__ import annotations

MEANINGS = {
    "store": ("`~/.local/share/imagefactory/store`", "the OCI image layout with everything that is kept"),
    "cache": ("`~/.cache/imagefactory`", "what can be fetched or made again"),
    "registry": ("none", "`HOST[:PORT][/PATH]`, where `push` sends images and `pull TARGET` looks"),
    "engine": ("`assemble`", "what builds: or `docker`, `apptainer`"),
    "runner": ("the engine's own", "what starts images: `unshare` (of `assemble`), `docker`, `apptainer`"),
    "certificates": (
        "none",
        "a PEM file with CA certificates to trust besides the machine's: for registries, index, channels, "
        "Debian's archive, inside builds",
    ),
    "plain-http": ("none", "registries without TLS: `HOST:PORT,...`"),
    "mirrors": (
        "none",
        'a table, `"docker.io" = "HOST/PATH"`: where to fetch bases and pulled images from',
    ),
    "index": ("what uv or pip are set to", "a Python package index (PEP 503 or 691)"),
    "indexes": (
        "none",
        'a table, `pytorch-cu128 = "https://..."`: the package indexes that `index` in recipes names',
    ),
    "debian-mirror": ("what apt is set to", "a Debian archive, or two: main and security"),
    "channels": (
        "none",
        'a table, `"conda-forge" = "https://..."` or a folder: where to ask conda\'s channels instead',
    ),
    "solver": (
        "`rattler`",
        "of conda's packages: or your own `conda`, `mamba`, `micromamba`, or a path to one",
    ),
    "codec": ("`zstd`", "of layers: or `gzip`, quicker to make, for engines that read no zstd too"),
    "workers": ("`0`", "what works at once; 0 is one per core"),
    "signing-key": (
        "the one key that you have",
        "what signs verdicts: the name of a key, or the path of a `.pem`",
    ),
    "catalogue": (
        "that of `registry`",
        "where signed catalogues are found: `HOST[:PORT][/PATH][:TAG]`, or a file (`/...`, `./...`, `~/...`)",
    ),
    "catalogue-mirrors": (
        "none",
        "where the catalog is read when its place does not answer: `HOST[:PORT][/PATH][:TAG],...` or files "
        "(`/...`). Ignored if a nearer file sets `catalogue`",
    ),
    "center": (
        "the site's name, else made of the catalogue's",
        "what the center of `catalogue` is called where several are joined: `CENTER/TARGET`",
    ),
    "site": (
        "`generic`",
        "whose rules submit files follow: or `chtc`, `ospool`, `igwn`, `slurm`, `kubernetes`",
    ),
    "licences": (
        "none",
        "what `sbom --check licences` allows: SPDX identifiers and names, `*` and `?` for any, with commas",
    ),
    "sif-folder": (
        "none",
        "where jobs find .sif files: a folder that the pool's machines share, or `osdf:///...`",
    ),
    "submit-commands": (
        "none",
        "lines of submit files, for the HTCondor jobs of sweeps and `submit`: `accounting_group = ...`, "
        "`priority = ...`, `nice_user = true`, `+NAME = ...`",
    ),
    "sbatch-options": (
        "none",
        "options of sbatch, for the Slurm jobs of sweeps and `submit`: "
        "`--account=... --partition=... --qos=... --time=...`",
    ),
    "sweep-machines": (
        "all",
        "where sweeps and nights run: names with commas, `*` and `?` for any, `!` before those to avoid",
    ),
    "sweep-gpu-hours": ("no limit", "GPU hours of one sweep; other cells wait for the next"),
    "sweep-jobs": ("no limit", "jobs of one sweep at once"),
}
"""By its name in imagefactory.toml: the default, and the meaning; Markdown, one line each."""
