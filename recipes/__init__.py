"""The options of each config group, such as `model` and `optimizer`, and the recipe that trains with one option of each group."""
