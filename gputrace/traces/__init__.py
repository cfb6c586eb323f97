"""Files of any recorder, read into one columnar model."""
