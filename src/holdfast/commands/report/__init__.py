"""The command `report`: one page, and pictures, of what one or several runs did."""
