"""Write the table as a page: `python -m meshrunner.recipes.compatibility > docs/compatibility.md`."""

from meshrunner.recipes.compatibility import markdown_table

print(markdown_table())
