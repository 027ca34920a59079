"""Must-links and cannot-links: `Constraints`, the pairs file, the graph of links, what links say of others."""
