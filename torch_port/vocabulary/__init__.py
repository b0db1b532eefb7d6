"""The draft vocabulary: which target ids a draft can say, and how its buffers stay right."""
