"""What finished sequences leave behind for later prompts that begin alike."""
