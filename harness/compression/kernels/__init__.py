"""The arithmetic of codecs. Of each family: what defines it, what does it fast, and bytes alike.

    fixpoint        reference.py     fused.py, by cpu.py            fixpoint.cu, by cuda.py
    block codecs    reference_blocks blocks.py, by cpu_blocks.py    blocks.cu, by cuda_blocks.py
    grid, lossless  reference_grid   rans.py, by entropy.py         (CPU only, as those below)
    topk, randk     reference_select select.py, positions.py
    hadamard        reference_select rotate.py
    kmeans                           levels.py (held against torch.searchsorted)

layout.py says which scale is whose, cuda_device.py finds the GPU.
"""
