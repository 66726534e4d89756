"""docs/performance.md, its plots, and README's table."""
