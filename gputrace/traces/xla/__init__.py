"""Files of the profiler that TensorFlow and JAX share.

wire      protobuf's encoding, decoded for many messages at once
xspace    .xplane.pb: an XSpace message, as lines
chrome    .trace.json.gz: the same lines, as the trace viewer is given them
lines     a line: what happened on one stream or one host thread
reader    lines as event columns
"""
