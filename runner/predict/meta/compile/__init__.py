"""torch.compile on meta: its graphs are interpreted instead of turned into kernels."""
