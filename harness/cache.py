"""Where downloads, tokenizers and pretrained models are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$THINPIPE_CACHE, else $XDG_CACHE_HOME/thinpipe, else ~/.cache/thinpipe."""
    named = os.environ.get("THINPIPE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinpipe"
