"""Starting servers on hosts, loading them, capturing windows and cleaning up."""
