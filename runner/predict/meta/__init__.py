"""Everything that makes the meta device behave like a CPU or a GPU, each with its reason."""
