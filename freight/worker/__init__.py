"""The program on the device: it drives one model server and answers the records that it is handed."""
