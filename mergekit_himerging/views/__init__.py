"""Views of a plan: tables, plots and Markdown, from the plan alone."""
