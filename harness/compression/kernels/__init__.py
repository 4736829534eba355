"""The arithmetic of codecs: reference.py defines it, cpu.py does it fused, layout.py says which scale is whose."""
