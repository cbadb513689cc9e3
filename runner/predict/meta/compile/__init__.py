"""Stand-ins for torch.compile: its graphs, interpreted on meta."""
