"""The methods of compression: policies, selectors and suffix policies, one method a file."""
