"""Files that recorded processes leave behind."""
