"""``gputrace mcp``: tools for agents, by the Model Context Protocol."""
