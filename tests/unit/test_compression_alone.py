"""The compression package stands alone: it can be used where the rest of the harness, or its torch, is not."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from thinpipe.harness import plugins
from thinpipe.harness.compression import base, grammar

built = 0
for kind in ("codecs", "memories"):
    for plugin in plugins.find(kind).values():
        for text in plugin.load().CONTRACT:
            grammar.build(text)
            built += 1
grammar.build("delta(fixpoint:4)")
assert built > 20
foreign = {
    "torch.distributed.pipelining", "transformers", "tokenizers", "datasets", "pandas", "pyarrow", "matplotlib",
    "pydantic", "typer", "rich", "sklearn", "cupy",
}
allowed = {"plugins", "errors", "compression"}
ours = {name.split(".")[2] for name in sys.modules if name.startswith("thinpipe.harness.")}
print(sorted(foreign & set(sys.modules)) + sorted(ours - allowed))
"""


def test_building_every_compressor_loads_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
