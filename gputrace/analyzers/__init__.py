"""Event columns in, plain results out. Nothing here prints, draws or opens a file."""
