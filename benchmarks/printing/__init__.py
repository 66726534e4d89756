"""Tables in Markdown and plots of result files."""
