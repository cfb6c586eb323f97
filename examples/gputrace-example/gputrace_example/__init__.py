"""An example of each sort of plugin that gputrace takes."""
