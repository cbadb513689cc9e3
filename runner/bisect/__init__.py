"""Find the change that made runs slower, larger or different. Repeat runs until the difference exceeds the noise."""
