"""What a program under way does, on a screen that is drawn anew each second."""
