"""A small package of recipes, as a user would write one."""
