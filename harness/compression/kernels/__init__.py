"""The arithmetic of codecs: reference.py defines it, cpu.py does the same fused, layout.py says which scale is whose."""
